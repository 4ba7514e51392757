"""One fine-tuning job, run by Modelwright, by TRL, and with PEFT: what `tuning_peers.py` compares."""
