"""Modelwright: from raw text to a served, monitored language model, with every technique measured."""

__version__ = "0.1.0"
