"""Content blocks: the parts of which chat protocols and agent libraries make a message or a tool's answer.

They are dicts, or objects with the same fields (MCP's). Blocks of text are text. Of media only a name is text:
`[PNG image, 1,024 bytes]`.
"""

from __future__ import annotations

import base64
import binascii
import functools
import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_TEXT_KINDS = ("text", "input_text", "output_text", "text-plain")
MEDIA_KINDS = (
    "image", "image_url", "image_file", "input_image", "video", "video_url", "input_video", "audio", "audio_url",
    "input_audio", "file", "input_file", "document", "media", "resource", "resource_link",
)  # fmt: skip
"""Values of `type` of blocks that hold or name something other than text."""
_INLINE = ("data", "base64", "blob", "bytes", "file_data")
"""Fields that hold the media itself."""
_ADDRESSES = ("url", "uri", "file_id", "path")
_FIELDS = {
    "type", "id", "index", "image", "video", "audio", "source", "detail", "cache_control", "annotations", "extras",
    "_meta", "name", *_INLINE, *_ADDRESSES, "mime_type", "mimeType", "media_type", "format",
}  # fmt: skip
"""The fields of blocks of pictures, films and sound; one with others is data."""
_TEXT_FIELDS = {
    "type", "text", "refusal", "resource", "source", "id", "index", "annotations", "citations", "cache_control",
    "extras", "_meta", "logprobs", "mime_type",
}  # fmt: skip
"""The fields of blocks of text; one with others, such as a score, is data."""
_BLOCK_LIBRARIES = ("anthropic", "openai")
"""Libraries whose objects with a `type` are blocks."""
_MCP_FIELDS = {
    "content", "isError", "is_error", "structuredContent", "structured_content", "_meta", "meta", "resultType",
    "result_type",
}  # fmt: skip
_MAX_DEPTH = 100
"""How deep media are looked for."""
_MCP_CLASSES = (
    "TextContent", "ImageContent", "AudioContent", "EmbeddedResource", "ResourceLink", "TextResourceContents",
    "BlobResourceContents",
)  # fmt: skip
_MIME_TYPES = ("mime_type", "mimeType", "media_type", "format")
_KINDS_OF_BYTES = (
    (b"\x89PNG", "PNG image"), (b"\xff\xd8\xff", "JPEG image"), (b"GIF8", "GIF image"), (b"RIFF", "RIFF media"),
    (b"%PDF", "PDF document"), (b"PK\x03\x04", "ZIP archive"), (b"\x1f\x8b", "gzip archive"), (b"OggS", "Ogg media"),
    (b"ID3", "MP3 audio"), (b"\x7fELF", "ELF program"),
)  # fmt: skip
_MIN_BASE64 = 64
"""Characters of the shortest text that is taken for media in base64 where no MIME type says so."""
_MAX_NAME = 200
_MAX_REPLACED = 0.3
"""Largest share of characters that cannot be decoded in what still counts as text."""


# -------------------------------------------------------------------- text


def text_of_block(block: object) -> str | None:
    """The text of one block: of text, of a refusal, or of MCP's embedded resource; None for any other object."""
    if isinstance(block, str):
        return block
    kind = _field(block, "type")
    if kind == "refusal":
        text = _field(block, "refusal")
    elif kind == "resource":
        text = _field(_field(block, "resource"), "text")
    elif kind == "document":
        text = _text_of_source(_field(block, "source"))
    elif kind in _TEXT_KINDS or _holds_text_alone(block):
        text = _field(block, "text")
        text = _field(text, "value") if isinstance(text, Mapping) else text
    else:
        return None
    return text if isinstance(text, str) else None


def _text_of_source(source: object) -> object:
    """The text that an Anthropic document holds; None for one of another kind."""
    if _field(source, "type") == "content":
        return text_of_blocks(_field(source, "content"))
    return _field(source, "data") if _field(source, "type") == "text" else None


def _holds_text_alone(block: object) -> bool:
    """Whether this is `{"text": ...}`, a block without a type; with other fields it is data."""
    return isinstance(block, Mapping) and [name for name, value in block.items() if value is not None] == ["text"]


def text_of_blocks(content: object) -> str | None:
    """The texts of a list of blocks, or of a single one, on lines of their own; None if not all of it is text."""
    blocks = content if isinstance(content, (list, tuple)) else [content]
    texts = [text_of_block(block) for block in blocks]
    found = [text for text in texts if text is not None]
    return "\n".join(found) if len(found) == len(texts) else None


# -------------------------------------------------------------------- media


def name_of_media(block: object) -> str | None:
    """Kind and size, or address, of the media in a block: `[image: https://...]`; None for any other object.

    What only looks like a block, such as an entry of a directory (`{"type": "file", "path": ...}`), is data.
    """
    kind = _field(block, "type")
    if not isinstance(kind, str) or kind not in MEDIA_KINDS or text_of_block(block) is not None:
        return None
    for name in (kind, kind.removeprefix("input_"), "image_url", "source", "resource", *_INLINE, *_ADDRESSES):
        holder = _field(block, name)
        inner = [_field(holder, name) for name in (*_INLINE, *_ADDRESSES)] if _is_block(holder) else [holder]
        for payload in (item for item in inner if item is not None):
            named = _inline_name(kind, payload, _mime_type(block) or _mime_type(holder))
            if named is None and _names_media(block, kind):
                named = f"[{kind}: {payload}]" if isinstance(payload, str) else f"[{kind}, {type(payload).__name__}]"
            if named is not None:
                return named[:_MAX_NAME]
    return None


def _names_media(block: object, kind: str) -> bool:
    """Whether a block that holds an address is one: of MCP, of a kind that no data has, or with no other fields."""
    if not isinstance(block, Mapping) or kind.startswith("input_") or kind.endswith(("_url", "image_file")):
        return True
    is_seen_or_heard = kind in ("image", "video", "audio")
    return is_seen_or_heard and all(name in _FIELDS for name, value in block.items() if value is not None)


def _inline_name(kind: str, payload: object, mime_type: str | None) -> str | None:
    """The name of media given as bytes or in base64, with `data:` before it or not; None for anything else."""
    if isinstance(payload, str):
        header, found, encoded = payload.partition(",")
        if payload.startswith("data:") and found:
            mime_type = mime_type or header.removeprefix("data:").partition(";")[0]
        elif "://" in payload[:16] or (len(payload) < _MIN_BASE64 and mime_type is None):
            return None
        else:
            encoded = payload
        try:
            payload = base64.b64decode("".join(encoded.split()), validate=True)
        except (binascii.Error, ValueError):
            return None if mime_type is None else f"[{mime_type}, {len(encoded):,} characters]"
    if not isinstance(payload, bytes):
        return None
    return f"[{_kind_of_bytes(payload) or mime_type or kind}, {len(payload):,} bytes]"


def describe_blocks(value: object) -> str | None:
    """The text of content blocks that a tool returned: texts, and media by name; None if it is no blocks.

    A list of plain strings is data, and so is a single dict with a text. Of MCP's `CallToolResult` each part has
    a line.
    """
    blocks = _blocks_of(value)
    is_mcp = is_mcp_result(value)
    if is_mcp and not blocks:
        return "(no output)"
    is_data = isinstance(value, Mapping) and not is_mcp and name_of_media(value) is None
    if is_data or not any(isinstance(_field(block, "type"), str) for block in blocks):
        return None
    lines = []
    for block in blocks:
        line = None if _has_other_fields(block) and not is_mcp else text_of_block(block)
        line = name_of_media(block) if line is None else line
        if line is None and is_mcp:
            line = f"[{_field(block, 'type')}]"
        if line is None:
            return None
        lines.append(line)
    return "\n".join(lines)


def _has_other_fields(block: object) -> bool:
    """Whether this is a dict with a field that no block of text has, which its text would not show."""
    return isinstance(block, Mapping) and any(
        name not in _TEXT_FIELDS for name, value in block.items() if value is not None
    )


def is_mcp_result(value: object) -> bool:
    """Whether this is MCP's `CallToolResult`, whose package is not needed here, or the dict that it is sent as."""
    if not isinstance(value, Mapping):
        return type(value).__name__ == "CallToolResult" and isinstance(getattr(value, "content", None), list)
    content = value.get("content")
    if not isinstance(content, list) or not content or not _MCP_FIELDS.issuperset(value):
        return False
    return all(isinstance(block, Mapping) and isinstance(block.get("type"), str) for block in content)


def part_of_mcp(result: object, *names: str) -> Any:
    """A field of such a result, under the first of its names that there is; None if it has none."""
    for name in names:
        found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if found is not None:
            return found
    return None


def media_in(value: object) -> list[str]:
    """The names of the media that a tool returned: in blocks at any depth, or as bytes."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        name = describe_bytes(bytes(value))
        return [] if name is None else [name]
    names: list[str] = []
    for block in _blocks_of(value):
        with_named_media(block, names=names)
    return names


def with_named_media(value: Any, *, names: list[str] | None = None, depth: int = 0) -> Any:
    """Data with a name in place of each block of media in it; itself if there is none. `names` gets the names."""
    if depth > _MAX_DEPTH:
        return value
    name = name_of_media(value)
    if name is not None:
        if names is not None:
            names.append(name)
        return name
    if isinstance(value, dict):
        changed = {key: with_named_media(part, names=names, depth=depth + 1) for key, part in value.items()}
        return changed if any(changed[key] is not part for key, part in value.items()) else value
    if type(value) in (list, tuple):
        parts = [with_named_media(part, names=names, depth=depth + 1) for part in value]
        is_same = all(new is old for new, old in zip(parts, value, strict=True))
        return value if is_same else type(value)(parts)
    return value


def _blocks_of(value: object) -> list[object]:
    """Candidates for blocks: the parts of a list or of MCP's result, or the single value."""
    if is_mcp_result(value):
        value = part_of_mcp(value, "content")
    return value if isinstance(value, list) else [value]


@functools.cache
def warn_of_media(tool: str) -> None:
    """Say once for each tool that the model does not see what the tool returned."""
    logger.warning(
        "Tool %r returned an image, or other media. Rollouts are text only: the model reads only its kind and size or "
        "its address. Return text that says what it shows. Reported once for each tool.",
        tool,
    )


def describe_bytes(value: bytes) -> str | None:
    """Kind and size of bytes, such as `[PNG image, 1,024 bytes]`; None for bytes of text."""
    kind = _kind_of_bytes(value)
    text = value.decode("utf-8", errors="replace")
    is_text = "\0" not in text and text.count("\ufffd") <= _MAX_REPLACED * len(text)
    if is_text and kind is None:
        return None
    return f"[{kind or 'binary data'}, {len(value):,} bytes]"


def _kind_of_bytes(value: bytes) -> str | None:
    return next((name for magic, name in _KINDS_OF_BYTES if value.startswith(magic)), None)


def _mime_type(holder: object) -> str | None:
    found = (_field(holder, name) for name in _MIME_TYPES)
    return next((value for value in found if isinstance(value, str) and value), None)


def _is_block(owner: object) -> bool:
    if isinstance(owner, Mapping) or type(owner).__name__ in _MCP_CLASSES:
        return True
    return type(owner).__module__.partition(".")[0] in _BLOCK_LIBRARIES and hasattr(owner, "model_dump")


def _field(owner: object, name: str) -> object:
    """A field of a block, which is a dict or an object of MCP."""
    if isinstance(owner, Mapping):
        return owner.get(name)
    return getattr(owner, name, None) if _is_block(owner) else None
