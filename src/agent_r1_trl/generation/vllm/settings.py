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
        "URLs of the servers, for example http://127.0.0.1:8000. None: TRL's `vllm_server_base_url`, or its host and "
        "port.",
    )
    urls_file: Words | None = setting(
        None,
        "Path of a file with the servers' URLs, one a line, in place of urls; read again at each weight sync.",
    )
    weight_transfer: Annotated[str, OneOf("auto", "nccl", "folder")] = setting(
        "auto",
        "Way of whole weights to the servers: 'nccl' (from GPU to GPU), 'folder' (files in output_dir), or 'auto': "
        "NCCL for each server that can.",
    )
    max_logprob_gap: Positive | None = setting(
        None,
        "Largest mean difference between the log-probabilities of sampler and trainer after a weight sync; beyond it "
        "the run stops. None: 1e-3 in float32, else 0.05.",
    )
    request_timeout: Seconds = setting(
        600.0,
        "Seconds that one turn may take on a server, or one step of the engine in this process.",
    )
    health_timeout: Seconds = setting(
        30.0,
        "Seconds of silence to health checks after which a server counts as frozen and is excluded. A slow one "
        "answers them.",
    )
    retry_window: Seconds = setting(
        300.0,
        "Seconds that requests and weight syncs wait while no server is usable. Set it longer than a restart of your "
        "servers takes.",
    )
    sync_timeout: Seconds = setting(
        120.0,
        "Seconds that a server may take over one part (256 MiB) of a weight sync, before it is excluded.",
    )
