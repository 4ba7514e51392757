"""Parts for agents in addition to the chat API: /v1/responses, tools of MCP servers, and conversations with calls."""
