"""Writes docs/python.ipynb from docs/python.md: headings and text become Markdown cells, blocks of Python code cells.

python docs/notebook.py
"""

import json
import re
from pathlib import Path
from typing import Any

PAGE, NOTEBOOK = (Path(__file__).parent / f"python.{suffix}" for suffix in ("md", "ipynb"))
INSTALL = "%pip install -q 'modelwright[serve]' openai pandas"


def cells(page: str) -> list[tuple[str, str]]:
    """Returns the kind and the text of each cell, without the one that installs."""
    found: list[tuple[str, str]] = []
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```\n", page, flags=re.MULTILINE | re.DOTALL)):
        # A heading begins a cell of its own, so that notebooks show an outline.
        texts = [part] if number % 2 else re.split(r"^(?=## )", part, flags=re.MULTILINE)
        found += [("code" if number % 2 else "markdown", text.strip()) for text in texts if text.strip()]
    return found


def notebook(page: str) -> str:
    """Returns the notebook of a page, in version 4.5 of the format."""
    made: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate([("code", INSTALL), *cells(page)]):
        made.append(
            {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        )
        if kind == "code":
            made[-1] |= {"execution_count": None, "outputs": []}
    made[:2] = made[1::-1]  # the title comes first
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
