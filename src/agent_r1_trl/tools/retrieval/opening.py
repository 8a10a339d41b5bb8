"""One setting for every kind of search: `open_retriever`."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.tools.retrieval.folder import MANIFEST, open_index
from agent_r1_trl.tools.retrieval.http import HttpRetriever, is_url
from agent_r1_trl.tools.search import Passage, SearchIndex


@runtime_checkable
class Retriever(Protocol):
    """What can be searched; from many threads at once.

    A retriever may also have `get(id) -> Passage | None`.
    """

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """The best `k` passages, best first.

        Raises:
            InfrastructureError: the search cannot be made now, through no fault of the query.
        """
        ...


RetrieverSource = Retriever | str | os.PathLike[str] | Mapping[str, Any]
"""See `open_retriever`."""

URL_OPTIONS = (
    "timeout_s", "attempts", "retry_wait_s", "max_connections", "max_batch", "cache_size", "dialect", "headers",
)  # fmt: skip
FILE_OPTIONS = ("title_weight",)
FOLDER_OPTIONS = ("kind", "title_weight", "device")

_opened: dict[str, Retriever] = {}
_lock = threading.Lock()


def open_retriever(source: RetrieverSource, *, flag: str = "retriever") -> Retriever:
    """A retriever from a setting; whatever the whole process can share is opened once.

    Args:
        source: the path of a JSONL or Parquet corpus, the folder of an index (`agent-r1-trl index`), the address of a
            server (`http://host:8010`), a mapping with `path` or `url` and options (`{"url": ..., "timeout_s": 5}`),
            or an object with a method `search`.
        flag: the setting, for errors.

    Raises:
        ValueError: there is no such file or index, or the setting has another form.
    """
    if isinstance(source, Mapping):
        return _from_mapping(dict(source), flag)
    if is_url(source):
        return _shared(f"{source}", lambda: HttpRetriever(str(source)))
    if isinstance(source, str | os.PathLike) and str(source):
        return _from_path(Path(source), {}, flag)
    if callable(getattr(source, "search", None)) and not isinstance(source, type):
        return source  # type: ignore[return-value]
    raise ValueError(
        f"{flag}={source!r:.200}: must be the path of a corpus or an index, the address of a server, a mapping with "
        "'path' or 'url', or an object with a search method. Set it to one of them."
    )


def _from_mapping(settings: dict[str, Any], flag: str) -> Retriever:
    places = [name for name in ("path", "url") if name in settings]
    if len(places) != 1:
        raise ValueError(f"{flag}={settings}: must have either 'path' or 'url'. Give it one of them.")
    place = settings.pop(places[0])
    is_folder = places == ["path"] and Path(place).is_dir()
    known = URL_OPTIONS if places == ["url"] else FOLDER_OPTIONS if is_folder else FILE_OPTIONS
    for name in settings:
        if name not in known:
            raise ValueError(
                f"{flag}: {name!r} is no option beside {places[0]!r}.{did_you_mean(name, known)} There are: "
                f"{', '.join(known)}."
            )
    if places == ["url"]:
        key = json.dumps([place, settings], sort_keys=True, default=repr)
        return _shared(key, lambda: HttpRetriever(place, **settings))
    return _from_path(Path(place), settings, flag)


def _from_path(path: Path, options: dict[str, Any], flag: str) -> Retriever:
    if path.is_dir():
        marked, make = path / MANIFEST, lambda: open_index(path, flag=flag, **options)
        if not marked.exists():
            make()  # says what is missing
    elif path.is_file():
        marked, make = path, lambda: SearchIndex(path, **options)
    else:
        raise ValueError(
            f"{flag}={str(path)!r}: no such file. Pass the path of a JSONL or Parquet file, or the folder of an index."
        )
    status = marked.stat()  # what has changed on disk is opened anew
    key = json.dumps([str(path.resolve()), status.st_size, status.st_mtime_ns, options], sort_keys=True)
    return _shared(key, make)


def _shared(key: str, make: Any) -> Any:
    with _lock:  # so that 256 environments that start together build an index once
        if key not in _opened:
            _opened[key] = make()
        return _opened[key]
