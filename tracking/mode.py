"""How W&B is used, decided before anything of it is imported, so that it never asks and never waits for an answer."""

import configparser
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

MODES = ("online", "offline", "disabled")
# The hosted server under its present and its earlier name; a key stored for either is good for both.
CLOUD = ("api.forge.coreweave.com", "api.wandb.ai")


class TrackingError(Exception):
    """Tracking cannot do what was asked; the message is one sentence with what to do about it."""

    is_sentence = True  # a traceback would add nothing


def decide(asked: str) -> tuple[str, str]:
    """The mode (online, offline or disabled) for `tracking.mode=asked`, and the reason in words.

    `auto` follows WANDB_MODE where that is set, is online with an API key, else offline. Raises TrackingError for
    `online` without a key.
    """
    asked = str(getattr(asked, "value", asked))
    where = key()
    if asked == "online" and not where:
        raise TrackingError(
            f"tracking.mode=online needs an API key for {server()}: run `wandb login` or set WANDB_API_KEY, "
            "or use tracking.mode=offline."
        )
    if asked != "auto":
        return asked, f"tracking.mode={asked}"
    if (told := os.environ.get("WANDB_MODE")) in MODES and not (told == "online" and not where):
        return told, f"WANDB_MODE={told}"
    if where:
        return "online", f"API key in {where}"
    return "offline", "no API key; `wandb login` gives one"


def server() -> str:
    """URL of the W&B server in use."""
    settings = configparser.ConfigParser()
    folder = os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")
    try:
        settings.read(Path(folder).expanduser() / "settings")
    except configparser.Error:
        return f"https://{CLOUD[0]}"  # W&B itself will say that its settings file is damaged
    stored = settings.get("default", "base_url", fallback=f"https://{CLOUD[0]}")
    return os.environ.get("WANDB_BASE_URL", stored)


def key() -> str | None:
    """Where W&B will find credentials for the server: an environment variable, a file, or None."""
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if os.environ.get(variable):
            return variable
    host = urlsplit(server()).netloc
    hosts = CLOUD if host in CLOUD else (host,)
    candidates = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for file in (Path(name).expanduser() for name in candidates):
        try:
            entries = netrc.netrc(file).hosts
        except FileNotFoundError:
            continue
        except (netrc.NetrcParseError, OSError):
            return None
        return str(file) if any(host in entries and entries[host][2] for host in hosts) else None
    return None
