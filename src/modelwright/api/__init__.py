"""The Python interface: what the commands do, as functions. `import modelwright as mw` offers all of it."""
