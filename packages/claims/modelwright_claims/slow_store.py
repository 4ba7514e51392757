"""A read-only S3-compatible store that is far away: every request waits, and all answers share one bandwidth.

    python -m modelwright_claims.slow_store FOLDER LATENCY_S BYTES_PER_S

serves the folders in FOLDER as buckets, prints its URL, and ends when its standard input is closed. It knows what reads
objects: GET and HEAD, of all bytes or of a range. Signatures are not checked.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from modelwright.core.config import ModelwrightError

NO_SUCH_KEY = "<Error><Code>NoSuchKey</Code></Error>"


class SlowStore:
    """Answers requests for the files of a folder. latency_s: of each; bytes_per_s: of all answers together."""

    def __init__(self, folder: Path, *, latency_s: float, bytes_per_s: float) -> None:
        self.folder = folder.resolve()
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        """Time of the event loop at which the wire will have sent all earlier answers."""

    async def answer(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.latency_s)
        path = (self.folder / request.match_info["object"]).resolve()
        if not path.is_relative_to(self.folder) or not path.is_file():
            return web.Response(
                status=404, text="<Error><Code>NoSuchKey</Code></Error>", content_type="application/xml"
            )
        content, headers, status = path.read_bytes(), {"ETag": f'"{path.stat().st_mtime_ns:x}"'}, 200
        if "Range" in request.headers:
            total = len(content)
            first, last, _ = request.http_range.indices(total)
            content, status = content[first:last], 206
            headers["Content-Range"] = f"bytes {first}-{last - 1}/{total}"
        if request.method != "HEAD":
            await self._send(len(content))
        return web.Response(body=content, status=status, headers=headers)

    async def _send(self, num_bytes: int) -> None:
        """Wait until the wire has sent so many bytes, after those that were asked for before."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + num_bytes / self.bytes_per_s
        await asyncio.sleep(self._free_at - now)


async def serve(store: SlowStore) -> None:
    """Print the URL, and serve until standard input ends."""
    app = web.Application()
    app.router.add_get("/{object:.+}", store.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    print(f"http://{host}:{port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


@contextmanager
def serving(folder: Path, *, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """Serve a folder from a separate process; gives the URL."""
    command = [sys.executable, "-m", __name__, str(folder), str(latency_s), str(bytes_per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise ModelwrightError("the slow store does not start; its error is above")
            yield url
        finally:
            process.stdin.close()


if __name__ == "__main__":
    place, latency_s, bytes_per_s = sys.argv[1:]
    asyncio.run(serve(SlowStore(Path(place), latency_s=float(latency_s), bytes_per_s=float(bytes_per_s))))
