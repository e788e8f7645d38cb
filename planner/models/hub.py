"""A model's `config.json` from the Hugging Face Hub, when it can be reached (huggingface_hub, imported only here)."""

import json
import threading
from pathlib import Path

ANSWER_SECONDS = 1.5  # to hear from the Hub at all: a machine without network must not keep its user waiting
NO_SUCH_NAME = "the Hub allows no such name"
DOWNLOAD_SECONDS = 10.0  # for the few kB of a config.json, once the Hub has answered


def hub_config(name: str) -> dict[str, object] | str:
    """The config of `org/name`, or one clause that says why there is none."""
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError:
        return "huggingface_hub is not installed"
    try:
        path = huggingface_hub.try_to_load_from_cache(name, "config.json")
    except errors.HFValidationError:
        return NO_SUCH_NAME
    if isinstance(path, str):
        return _parsed(path)
    if constants.HF_HUB_OFFLINE:
        return "the Hub is switched off (HF_HUB_OFFLINE)"
    return _download(name)


def _download(name: str) -> dict[str, object] | str:
    """First one request without retries, since `hf_hub_download` retries for 23 seconds when there is no network.

    In a thread, since no timeout covers a name server that is silent.
    """
    outcome: list[dict[str, object] | str] = []
    connected = threading.Event()
    thread = threading.Thread(target=lambda: outcome.append(_asked(name, connected)), daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if connected.is_set():
        thread.join(DOWNLOAD_SECONDS)
    return outcome[0] if outcome else "the Hub did not answer in time"


def _asked(name: str, connected: threading.Event) -> dict[str, object] | str:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"), timeout=ANSWER_SECONDS)
        connected.set()
        return _parsed(huggingface_hub.hf_hub_download(name, "config.json"))
    except errors.GatedRepoError:
        return "its repository on the Hub is gated (log in with `hf auth login`)"
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError):
        return "the Hub has no config.json of that name"
    except errors.HFValidationError:
        return NO_SUCH_NAME
    except Exception as error:  # "not reachable" is a different class in each HTTP client that huggingface_hub has used
        return f"the Hub is not reachable ({type(error).__name__})"


def _parsed(path: str) -> dict[str, object] | str:
    try:
        parsed = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        return f"its config.json is not readable ({type(error).__name__})"
    return parsed if isinstance(parsed, dict) else "its config.json is no JSON object"
