"""Examples of extensions to Modelwright, one file each."""
