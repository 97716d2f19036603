"""Upload an exported directory to the model hub, with huggingface_hub.

Repeating an interrupted upload continues it: the server keeps finished files, and they are not sent again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from echo_shared.errors import ConfigError

_TROUBLE: Final[tuple[type[Exception], ...]] = (*HfHubHTTPError.__bases__, ValueError, RuntimeError)
"""Exceptions that an upload may raise: the base classes of huggingface_hub's errors for connections, answers and ids,
and of hf_xet's errors."""
_ADVICE: Final = {
    401: "Log in with a token that may write, or set HF_TOKEN: hf auth login",
    403: "Use a token that may write to this account: hf auth login",
    404: "Check the id, and that your token may write to this account.",
}


def push(folder: Path, repo_id: str, *, public: bool) -> str:
    """Upload the files of `folder` to the repository `repo_id`, and return the repository's address.

    A missing repository is created: private, unless `public`. Raises ConfigError if the upload fails, or if the
    repository is public and `public` is False.
    """
    if not (folder / "README.md").is_file():
        raise ConfigError(
            "This directory is not an export: it has no model card.",
            got=str(folder),
            do="Write one first: echo-hub export RUN DIR",
        )
    api = HfApi()
    try:
        is_private = _is_private(api, repo_id)
        if is_private is None:
            api.create_repo(repo_id, private=not public, exist_ok=True)
        elif not is_private and not public:
            raise ConfigError(
                "This repository is public, so everybody could read the model.",
                got=repo_id,
                do="Add --public, or name another repository.",
            )
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=f"Upload {folder.name}")
    except _TROUBLE as error:
        raise _explained(error, folder, repo_id, public=public) from error
    return f"{api.endpoint}/{repo_id}"


def _is_private(api: HfApi, repo_id: str) -> bool | None:
    """Return True if the repository exists and is private. Return None if it does not exist, or if this token cannot
    see it.
    """
    try:
        return bool(api.repo_info(repo_id).private)
    except RepositoryNotFoundError:
        return None


def _explained(error: Exception, folder: Path, repo_id: str, *, public: bool) -> ConfigError:
    again = f"echo-hub push {folder} {repo_id}{' --public' if public else ''}"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        said = error.server_message or str(error).strip().splitlines()[0]
        advice = _ADVICE.get(status, "Try again later.")
        return ConfigError(
            "The model hub refused the upload.",
            got=f"{repo_id}: HTTP {status}: {said}",
            do=f"{advice} Then continue: {again}",
        )
    return ConfigError(
        "The upload to the model hub did not finish.",
        got=f"{repo_id}: {str(error).strip() or type(error).__name__}",
        do=f"Check the id and the connection. Then continue: {again}",
    )
