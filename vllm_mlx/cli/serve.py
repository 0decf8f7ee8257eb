"""`vllm-mlx serve`: load, say what was loaded, serve. Knows no route and no layer below the engine's front."""

import logging
import sys
import time

from rich.console import Console

from .banner import Banner, local_url
from .settings import Settings
from .sources import unknown_variables

logger = logging.getLogger(__name__)


def run_server(settings: Settings) -> None:
    """Returns after Ctrl-C. Raises ConfigError before anything is served."""
    configure_logging(settings.log_level)
    for line in unknown_variables():
        logger.warning("%s", line)
    engine_config = settings.engine_config()

    from ..server.app import create_app
    from ..server.config import ServerConfig
    from ..server.run import listen, run

    server_config = ServerConfig(
        served_model_names=settings.served_model_names,
        api_keys=settings.api_keys,
        cors_origins=settings.cors_origin,
    )
    sock = listen(settings.host, settings.port)
    console = Console(highlight=False)
    console.print(f"Loading {settings.model}", markup=False)

    from ..engine.async_engine import AsyncEngine

    started_s = time.monotonic()
    engine = AsyncEngine.start(engine_config)
    banner = Banner(
        info=engine.info,
        budget_bytes=engine.memory.total_bytes,
        load_s=time.monotonic() - started_s,
        names=server_config.served_model_names,
        api_keys=server_config.api_keys,
        url=local_url(settings.host, sock.getsockname()[1]),
        host=settings.host,
    )
    app = create_app(engine, server_config)
    run(app, engine, sock, drain_s=settings.drain_s, started=lambda: banner.print_to(console))


def configure_logging(level: str) -> None:
    """Our own log at `level`; what libraries say only where it is a warning."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("vllm_mlx").setLevel(level.upper())
