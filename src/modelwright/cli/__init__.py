"""The command line: parsing, dispatch and terminal output. The commands' logic is in the other packages."""
