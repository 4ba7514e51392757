"""The HTTP interface: each route's body, handler and reply together, and what routes share."""
