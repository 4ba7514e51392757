"""The strategies of the search, one file each; `STRATEGIES` in `search/strategy_list.py` lists them."""
