"""The setting `servers`: which vLLM servers are sampled from, how weights reach them, and when they count as lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from agent_r1_trl.settings import OneOf, Positive, Seconds, SettingsGroup, Texts, Words, setting


@dataclass(kw_only=True)
class ServerSettings(SettingsGroup):
    """vLLM servers; `max_logprob_gap` and `request_timeout` hold for an engine in this process, too."""

    urls: Annotated[list[str], Texts()] | None = setting(
        None,
        "URLs of the servers to sample from with vllm_mode='server', for example http://127.0.0.1:8000. None: TRL's "
        "`vllm_server_base_url`, or its host and port.",
    )
    urls_file: Words | None = setting(
        None,
        "Path of a file with the servers' URLs, one a line, in place of urls, read again at each weight sync: a new "
        "server joins with the current weights, one that is gone is dropped.",
    )
    weight_transfer: Annotated[str, OneOf("auto", "nccl", "folder")] = setting(
        "auto",
        "How whole weights go to the servers: 'nccl' (from GPU to GPU), 'folder' (through files in output_dir, which "
        "the server must see), or 'auto', which takes NCCL for each server that can.",
    )
    max_logprob_gap: Positive | None = setting(
        None,
        "Stop the run if the log-probabilities of sampler and trainer differ by more than this after a weight sync "
        "(mean absolute difference). None: 1e-3 in float32, else 0.05.",
    )
    request_timeout: Seconds = setting(
        600.0,
        "Seconds that one turn may take on a server; the request then goes to another server. In process: seconds "
        "that one step of the engine may take; its requests then fail.",
    )
    health_timeout: Seconds = setting(
        30.0,
        "Seconds of silence to health checks while requests wait. A slow server answers them; a frozen one is "
        "excluded, and its requests go to other servers.",
    )
    retry_window: Seconds = setting(
        300.0,
        "Seconds for which a request, or a weight sync, waits while no server can serve it. Set it longer than a "
        "restart of your servers takes.",
    )
    sync_timeout: Seconds = setting(
        120.0,
        "Seconds that a server may take over one part (256 MiB) of a weight sync. One that takes longer is excluded.",
    )
