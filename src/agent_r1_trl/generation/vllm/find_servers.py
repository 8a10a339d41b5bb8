"""Check the addresses of vLLM servers, and wait until the servers answer."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from agent_r1_trl.generation.base import GenerationError
from agent_r1_trl.generation.vllm.http_client import HTTPClient, HTTPError

logger = logging.getLogger(__name__)

_NO_VLLM = (
    "{url} is not a vLLM server, or has the wrong port: {reason}. Set vllm_server_urls to the addresses that `vllm "
    "serve` printed."
)


def check_urls(urls: Sequence[str]) -> list[str]:
    """The URLs without a slash at the end.

    Raises:
        ValueError: no URL is given, one is not a URL, or one is given twice.
    """
    cleaned = [url.rstrip("/") for url in urls]
    for url in cleaned:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(
                f"vllm_server_urls={list(urls)}: {url!r} is no URL of a server. Write it like http://127.0.0.1:8000."
            )
    if not cleaned or len(set(cleaned)) < len(cleaned):
        raise ValueError(
            f"vllm_server_urls={list(urls)} must name at least one server, and each once. Give a list of URLs such as "
            "http://127.0.0.1:8000."
        )
    return cleaned


async def wait_for_servers(http: HTTPClient, urls: Sequence[str], timeout_s: float) -> dict[str, str]:
    """URL -> name of the server's base model, once all have answered.

    Args:
        http: client for the requests.
        urls: of servers that may still be starting.
        timeout_s: seconds for all of them together.

    Raises:
        GenerationError: one does not answer within `timeout_s`, or is not a vLLM server.
    """
    waiting = {url: f"{url}: no answer" for url in urls}  # URL -> what it said last

    async def name_of_model(url: str) -> str:
        while True:
            try:
                name = (await http.request("GET", f"{url}/v1/models"))["data"][0]["id"]
                del waiting[url]
                return name
            except (TypeError, LookupError) as error:
                raise GenerationError(_NO_VLLM.format(url=url, reason="names no model")) from error
            except HTTPError as error:
                if not error.is_passing:
                    raise GenerationError(_NO_VLLM.format(url=url, reason=str(error))) from error
                if waiting[url] != str(error):
                    logger.warning("Waiting up to %g s for the vLLM server: %s", timeout_s, error)
                waiting[url] = str(error)
                await asyncio.sleep(0.5)

    try:
        async with asyncio.timeout(timeout_s):
            names = await asyncio.gather(*(name_of_model(url) for url in urls))
    except TimeoutError as error:
        raise GenerationError(
            f"Not every server of {', '.join(urls)} answered within {timeout_s:g} s "
            f"({'; '.join(waiting.values())}). Start them first (docs/serving.md), or raise vllm_server_timeout."
        ) from error
    return dict(zip(urls, names, strict=True))


def own_address(urls: Sequence[str]) -> str:
    """The address of this machine that the servers can reach; if one of them is remote, it decides for all."""
    addresses = []
    for url in urls:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((urlsplit(url).hostname, 9))  # sends nothing, picks the route
            addresses.append(probe.getsockname()[0])
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])
