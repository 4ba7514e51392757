"""Tools of MCP servers for the chat page: which there are, and calls that its user has agreed to. Off unless the server
was started with `--mcp CONFIG`. The model never runs a tool: a request to /mcp/call comes from the page alone.
"""

import asyncio
import ipaddress
import json
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelwright.core.config import ConfigError
from modelwright.core.extensions import NoSettings
from modelwright.serve.api.fields import FunctionName, RequestModel, Strict
from modelwright.serve.api.operations import READS_BODY, Operation, RouteSpec
from modelwright.serve.api.parsing import read_request
from modelwright.serve.errors import ApiError, log
from modelwright.serve.service import Service, service_of

if TYPE_CHECKING:
    from mcp import ClientSession

WORD = "mcp"
START_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 60.0
MAX_RESULT_CHARACTERS = 65_536
"""Most characters of a result that are returned; a longer one is cut, and says so."""


class ToolServer(Strict):
    """A server of `mcpServers`: a program (`command`) or an address (`url`), in the form that desktop programs use."""

    command: str | None = None
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] | None = None
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] | None = None
    type: Literal["stdio", "http", "streamable-http"] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "ToolServer":
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command or url")
        return self


def read_servers(path: str) -> dict[str, ToolServer]:
    """Reads a file `{"mcpServers": {name: {...}}}`. Raises `ConfigError`."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"mcp: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"mcp: {path} is not JSON ({error})") from None
    servers = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError(f'mcp: {path} must be {{"mcpServers": {{"NAME": {{"command": "..."}}}}}}')
    try:
        read = TypeAdapter(dict[str, ToolServer]).validate_python(servers)
    except ValidationError as error:
        one = error.errors()[0]
        where = ".".join(map(str, one["loc"]))
        raise ConfigError(f"mcp: {path}: mcpServers.{where}: {one['msg'].removeprefix('Value error, ')}") from None
    return read


@dataclass
class ToolServers:
    """The sessions with all servers. A server that fails is named in the log and on the page; the others still work."""

    servers: dict[str, ToolServer]
    tools: dict[str, Any] = field(default_factory=dict)
    """Functions in the form of OpenAI's API, by their names."""
    problems: dict[str, str] = field(default_factory=dict)
    _sessions: dict[str, tuple["ClientSession", str]] = field(default_factory=dict)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        """Connects to all servers, and returns when each is ready or has failed."""
        ready = {name: asyncio.Event() for name in self.servers}
        for name, server in self.servers.items():
            self._tasks.append(asyncio.create_task(self._hold(name, server, ready[name])))
        await asyncio.gather(*(one.wait() for one in ready.values()))

    async def close(self) -> None:
        self._stopping.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hold(self, name: str, server: ToolServer, ready: asyncio.Event) -> None:
        """Holds a session from start to end; the library wants both in one task."""
        import httpx
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(START_TIMEOUT_S):
                    if server.command is not None:
                        words = StdioServerParameters(
                            command=server.command, args=server.args, env=server.env, cwd=server.cwd
                        )
                        ends = await stack.enter_async_context(stdio_client(words))
                    else:
                        # A tool may take minutes; a redirect may add a slash to the address.
                        limits = httpx.Timeout(START_TIMEOUT_S, read=300.0)
                        web = httpx.AsyncClient(headers=server.headers, timeout=limits, follow_redirects=True)
                        await stack.enter_async_context(web)
                        opened = streamable_http_client(server.url or "", http_client=web)
                        ends = await stack.enter_async_context(opened)
                    session = await stack.enter_async_context(ClientSession(ends[0], ends[1]))
                    await session.initialize()
                    listed = (await session.list_tools()).tools
                for tool in listed:
                    shown = re.sub(r"[^a-zA-Z0-9_-]", "_", tool.name)[:64]
                    shown = shown if shown not in self.tools else f"{name}_{shown}"[:64]
                    function = {"name": shown, "description": tool.description or "", "parameters": tool.inputSchema}
                    self.tools[shown] = {"type": "function", "function": function}
                    self._sessions[shown] = (session, tool.name)
                log.info("MCP server %s offers %s", name, ", ".join(tool.name for tool in listed) or "no tools")
                ready.set()
                await self._stopping.wait()
        except (Exception, BaseExceptionGroup) as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            reason = f"no answer within {START_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else str(error)
            self.problems[name] = (reason or type(error).__name__)[:300]
            log.warning("MCP server %s cannot be used: %s", name, self.problems[name])
        finally:
            ready.set()

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Returns the text of a result, and whether it is an error. Raises `ApiError` for an unknown tool."""
        if name not in self._sessions:
            known = ", ".join(self.tools) or "none"
            raise ApiError(
                404, f"There is no tool {name!r}; this server has {known}.", param="name", code="no_such_tool"
            )
        session, own_name = self._sessions[name]
        try:
            result = await session.call_tool(own_name, arguments, timedelta(seconds=CALL_TIMEOUT_S))
        except Exception as error:  # whatever a server or its transport does is the result of the call
            return f"error: {str(error)[:300] or type(error).__name__}", True
        parts = [one.text if one.type == "text" else f"[{one.type} is not shown]" for one in result.content]
        # half a surrogate pair would break the reply
        text = "\n".join(parts).encode("utf-8", "replace").decode("utf-8")
        if len(text) > MAX_RESULT_CHARACTERS:
            text = f"{text[:MAX_RESULT_CHARACTERS]}\n[cut: {len(text):,} characters]"
        return text, bool(result.isError)


class ToolCallRequest(RequestModel):
    """POST /mcp/call. `arguments`: as the user has agreed to them."""

    name: FunctionName
    arguments: Annotated[dict[str, Any], Field(max_length=256)]


class ToolCallReply(BaseModel):
    """The result of a call."""

    result: str
    is_error: bool


class ToolListReply(BaseModel):
    """The tools, and the servers that cannot be used with the reasons."""

    tools: list[dict[str, Any]]
    problems: dict[str, str]


async def list_tools(request: Request) -> Response:
    servers: ToolServers | None = service_of(request).extensions.get(WORD)
    listed = {"tools": list(servers.tools.values()), "problems": servers.problems} if servers else {}
    return JSONResponse({"tools": [], "problems": {}} | listed)


async def call_tool(request: Request) -> Response:
    """Runs a tool. Pages of other origins cannot: the body has to be declared as JSON, which browsers ask permission
    for, `Origin` must be this server, and without keys its name must be an address or `localhost`, which no other site
    can point at this server (DNS rebinding).
    """
    service = service_of(request)
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    name = urlsplit(f"//{host}").hostname or ""
    is_json = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
    try:
        is_address = bool(ipaddress.ip_address(name))
    except ValueError:
        is_address = name == "localhost" or name.endswith(".localhost")
    is_own = origin is None or urlsplit(origin).netloc == host
    if not (is_json and is_own and (is_address or service.keys.callers)):
        text = "Tools are called from this server's own chat page, with a body of type application/json"
        raise ApiError(403, f"{text}; under a host name they need API keys.", code="foreign_page")
    asked = await read_request(request, ToolCallRequest)
    servers: ToolServers | None = service.extensions.get(WORD)
    if servers is None:
        raise ApiError(404, "This server has no tools; start it with --mcp CONFIG.", code="tools_off")
    result, is_error = await servers.call(asked.name, asked.arguments)
    return JSONResponse({"result": result, "is_error": is_error})


def prepare(service: Service, _: NoSettings) -> None:
    """Reads the file of `serve --mcp`. Raises `ConfigError`."""
    if service.config.mcp:
        servers = service.extensions[WORD] = ToolServers(read_servers(service.config.mcp))
        service.starting.append(servers.start)
        service.closing.append(servers.close)


LIST_TOOLS = RouteSpec(
    scope="infer",
    operation=Operation("GET", "/mcp/tools", list_tools, "The tools of the chat page", ToolListReply, prepare=prepare),
)
CALL_TOOL = RouteSpec(
    scope="infer",
    operation=Operation(
        "POST", "/mcp/call", call_tool, "Run a tool that the user has agreed to", ToolCallReply, ToolCallRequest,
        READS_BODY,
    ),
)  # fmt: skip
