"""Cursor sends its requests from its own servers: the steps a person takes, and why this machine's address is none."""

import ipaddress
from urllib.parse import urlsplit

_WHY = (
    "Cursor's own servers send its requests, so an address of this machine or its network means nothing to them. "
    "The server has to be reachable from the internet over https, behind a key."
)


def is_public(url: str) -> bool:
    """Whether servers elsewhere can take it for an address. Names are believed unless they are of this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https" or host == "localhost" or host.endswith((".local", ".localhost")) or "." not in host:
        return False
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True


def steps(*, url: str, model: str, has_key: bool) -> str:
    """What to do, up to the settings of Cursor."""
    if is_public(url) and has_key:
        return f"{_WHY}\n\n{_settings(url, model, '1')}"
    return f"""{_WHY}

1. Open a tunnel to the server, for instance with cloudflared or ngrok; both print an https address:
     cloudflared tunnel --url {url}
     ngrok http {urlsplit(url).port or 8000}
   Whoever knows that address and the key can use your server: close the tunnel when you are done.
2. Start the server again with a key, kept out of the command line, under a name without a slash, and let it go by
   the tunnel's name:
     export VLLM_MLX_API_KEY="$(openssl rand -hex 32)"
     vllm-mlx serve MODEL --served-model-name local --allowed-host YOUR-TUNNEL
3. Look whether it works from outside:
     vllm-mlx status --once --url https://YOUR-TUNNEL --api-key "$VLLM_MLX_API_KEY"
{_settings("https://YOUR-TUNNEL", "local", "4")}"""


def _settings(url: str, model: str, number: str) -> str:
    return f"""{number}. In Cursor, under Settings, Models:
     API Keys, OpenAI API Key        the server's key
     Override OpenAI Base URL        {url}/v1
     Add custom model                {model}
   Then choose that model in the chat. Its Tab completion stays with Cursor's own models."""
