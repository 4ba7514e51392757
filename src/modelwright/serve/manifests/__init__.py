"""Files by which systems that place containers or processes run the server: see `kinds`."""
