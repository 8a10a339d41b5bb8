"""Check the addresses of vLLM servers, wait until the servers answer, and see who else can reach them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from agent_r1_trl.generation.base import GenerationError
from agent_r1_trl.generation.vllm.http_client import HTTPClient, HTTPError

logger = logging.getLogger(__name__)

_NO_VLLM = (
    "{url} is not a vLLM server, or has the wrong port: {reason}. Set servers.urls to the addresses that `vllm "
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
                f"servers.urls={list(urls)}: {url!r} is no URL of a server. Write it like http://127.0.0.1:8000."
            )
    if not cleaned or len(set(cleaned)) < len(cleaned):
        raise ValueError(
            f"servers.urls={list(urls)} must name at least one server, and each once. Give a list of URLs such as "
            "http://127.0.0.1:8000."
        )
    return cleaned


async def wait_for_servers(http: HTTPClient, urls: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]]:
    """URL -> the server's base model as it describes it (`id`, `max_model_len`), once all have answered.

    Args:
        http: client for the requests.
        urls: of servers that may still be starting.
        timeout_s: seconds for all of them together.

    Raises:
        GenerationError: one does not answer within `timeout_s`, or is not a vLLM server.
    """
    waiting = {url: f"{url}: no answer" for url in urls}  # URL -> what it said last

    async def model_of(url: str) -> dict[str, Any]:
        while True:
            try:
                model = (await http.request("GET", f"{url}/v1/models"))["data"][0]
                _ = model["id"]
                del waiting[url]
                return model
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
            models = await asyncio.gather(*(model_of(url) for url in urls))
    except TimeoutError as error:
        raise GenerationError(
            f"Not every server of {', '.join(urls)} answered within {timeout_s:g} s "
            f"({'; '.join(waiting.values())}). Start them first (docs/serving.md), or raise vllm_server_timeout."
        ) from error
    return dict(zip(urls, models, strict=True))


async def check_exposure(http: HTTPClient, urls: Sequence[str], *, allow_public: bool, may_warn: bool = True) -> None:
    """Look at who else can reach the development routes of the servers, which have no password.

    Args:
        http: client for the requests.
        urls: of the servers.
        allow_public: whether public addresses are meant.
        may_warn: about addresses in a private network; False on all ranks but one.

    Raises:
        GenerationError: a server with these routes has a public address, and `allow_public` is off.
    """
    for url in urls:
        try:
            await http.request("GET", f"{url}/is_sleeping", timeout_s=10.0)
        except HTTPError:
            continue  # it has no such routes, as a server of adapters need not
        addresses = await asyncio.to_thread(_addresses_of, str(urlsplit(url).hostname))
        if any(address.is_global for address in addresses) and not allow_public:
            raise GenerationError(
                f"servers.urls: {url} has a public address and open development routes (VLLM_SERVER_DEV_MODE=1), "
                "with which anybody can replace its weights. Reach it through a private network or an SSH tunnel, or "
                "set servers.allow_public=True if a firewall keeps others out."
            )
        if may_warn and not all(address.is_loopback for address in addresses):
            logger.warning(
                "The development routes of %s can be reached from its network, and have no password: whoever calls "
                "them can replace the weights. docs/serving.md says how to keep others out.",
                url,
            )


def _addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    return [ipaddress.ip_address(address) for address in found]
