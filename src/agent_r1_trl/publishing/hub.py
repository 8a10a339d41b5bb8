"""Files to a repository of the Hub, in one commit: all of them, or none."""

from __future__ import annotations

import os
from collections.abc import Sequence

from agent_r1_trl.publishing.files import Sent


class HubError(RuntimeError):
    """The Hub could not be reached, or failed; the same command may succeed later."""


def push_files(
    repo_id: str,
    files: Sequence[Sent],
    *,
    repo_type: str = "model",
    private: bool | None = None,
    token: str | None = None,
    message: str = "Upload with agent-r1-trl",
) -> str:
    """Make the repository if there is none, and send the files; returns its address.

    Args:
        repo_id: `user/name`, or `name` for the user of the token.
        files: what is sent.
        repo_type: "model" or "dataset".
        private: whether a repository that is made now is a private one; True refuses to send to a public one. None:
            as the account has it.
        token: None: the one that is logged in, or `HF_TOKEN`.
        message: of the commit.

    Raises:
        ValueError: the Hub refuses the id, the token, the card or a file, or the repository is public and should not
            be; names it, and the cure.
        HubError: it cannot be reached, or answers with an error of its own.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token, library_name="agent-r1-trl")
    try:
        url = api.create_repo(repo_id, repo_type=repo_type, private=private, exist_ok=True)
        if private and api.repo_info(url.repo_id, repo_type=repo_type).private is False:
            raise ValueError(
                f"private: {url.repo_id} is there already, and is public. Make it private in its settings on the Hub, "
                "pass another --repo_id, or leave --private out."
            )
        api.create_commit(
            url.repo_id,
            [CommitOperationAdd(path_in_repo=item.name, path_or_fileobj=item.path) for item in files],
            repo_type=repo_type,
            commit_message=message,
        )
    except HFValidationError as error:
        raise ValueError(f"repo_id={repo_id!r}: {_first_line(error)} Pass user/name.") from error
    except LocalTokenNotFoundError as error:
        raise ValueError(_NO_TOKEN) from error
    except OfflineModeIsEnabled as error:
        raise ValueError(
            "HF_HUB_OFFLINE is set, so that nothing can be sent. Unset it, or look at what would be sent: --dry_run."
        ) from error
    except HfHubHTTPError as error:
        raise _explained(repo_id, error) from error
    except Exception as error:
        if not _is_of_transport(error):
            raise
        raise HubError(f"{api.endpoint}: cannot be reached ({_first_line(error)}). Try again later.") from error
    return str(url)


def _is_of_transport(error: Exception) -> bool:
    """Told by its name: huggingface_hub goes through httpx, from 2.4 on through httpx2, which is another package."""
    return any(kind.__name__ == "HTTPError" for kind in type(error).__mro__)


_NO_TOKEN = (
    "token: there is none. Log in (`hf auth login`), or set HF_TOKEN to a token that may write, from "
    "https://huggingface.co/settings/tokens."
)


def _explained(repo_id: str, error: Exception) -> Exception:
    """An answer of the Hub, with what to do about it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = getattr(error, "server_message", None) or _first_line(error)
    if status == 401:
        return ValueError(f"token: the Hub refuses it ({said}). {_NO_TOKEN.partition('. ')[2]}")
    if status == 403:
        return ValueError(
            f"repo_id={repo_id!r}: this token may not write there ({said}). Use a token with write access to that "
            "account, or pass another repo_id."
        )
    if status is not None and 400 <= status < 500 and status not in (408, 429):
        return ValueError(f"repo_id={repo_id!r}: the Hub refuses this ({said}). Correct it, and push again.")
    return HubError(f"repo_id={repo_id!r}: the Hub failed ({said}). Try again later.")


def _first_line(error: Exception) -> str:
    return " ".join(str(error).splitlines()[:1])
