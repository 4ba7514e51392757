"""Examples of what a package can add to Modelwright, one file each."""
