"""`vllm-mlx serve`: load, say what was loaded, serve. Knows no route and no layer below the engine's front."""

import logging
import sys
import time

from rich.console import Console

from ..core.errors import EngineDead, VLLMMLXError
from ..server.config import MAX_BODY_BYTES, ConnectionLimits, ServerConfig
from .banner import Banner, local_url
from .failures import BrokeDown
from .keys import refuse_open_door
from .output import Output, OutputHandler, descriptor_of
from .settings import Settings
from .sources import unknown_variables
from .terminal import console

logger = logging.getLogger(__name__)


def run_server(settings: Settings) -> None:
    """Returns once a signal ended it. Raises ConfigError before anything is served, BrokeDown after any other error."""
    try:
        _serve(settings)
    except EngineDead as error:
        raise BrokeDown(error.message) from error
    except VLLMMLXError:
        raise
    except Exception as error:  # the fence around the process: its supervisor learns that it may start another
        logger.exception("The server failed")
        raise BrokeDown(f"The server ended by an error of its own: {type(error).__name__}: {error}") from error


def _serve(settings: Settings) -> None:
    configure_logging(settings.log_level)
    for line in unknown_variables():
        logger.warning("%s", line)
    engine_config = settings.engine_config()

    from ..server.app import create_app
    from ..server.run import listen, run

    config = server_config(settings)
    refuse_open_door(
        settings.host, has_keys=not all(key.is_admin for key in config.api_keys), insecure=settings.insecure
    )
    sock = listen(settings.host, settings.port)
    screen = console()
    screen.print(f"Loading {settings.model}", markup=False)

    from ..engine.assembly import start_engine

    started_s = time.monotonic()
    engine = start_engine(engine_config)
    banner = Banner(
        info=engine.info,
        loaded=engine.model_facts,
        text_only=settings.text_only,
        budget_bytes=engine.memory.total_bytes,
        load_s=time.monotonic() - started_s,
        names=config.served_model_names,
        api_keys=settings.api_keys,
        url=local_url(settings.host, sock.getsockname()[1]),
        host=settings.host,
    )
    app = create_app(engine, config)
    run(
        app,
        engine,
        sock,
        drain_s=settings.drain_s,
        started=lambda: show(banner, screen),
        connections=config.connections,
    )


def server_config(settings: Settings) -> ServerConfig:
    """Raises ConfigError."""
    return ServerConfig(
        served_model_names=settings.served_model_names,
        api_keys=settings.keys,
        metrics_open=settings.metrics_open,
        host_names=settings.host_names,
        cors_origins=settings.cors_origin,
        separate_reasoning=settings.separate_reasoning,
        messages_thinking=settings.messages_thinking,
        keep_alive_s=settings.keep_alive_s,
        limits=settings.request_limits(),
        connections=ConnectionLimits(
            max_connections=settings.max_connections, head_s=settings.slow_client_s, take_s=settings.slow_client_s
        ),
        max_requests_per_minute=settings.max_requests_per_minute,
        body_s=settings.slow_client_s,
        max_body_bytes=settings.max_body_bytes or MAX_BODY_BYTES,
    )


def show(banner: Banner, screen: Console) -> None:
    """The event loop calls it, so it must not wait for a terminal that has been stopped."""
    with screen.capture() as captured:
        banner.print_to(screen)
    Output(descriptor_of(sys.stdout)).write(captured.get())


def configure_logging(level: str) -> None:
    """Our own log at `level`; what libraries say only where it is a warning."""
    handler = OutputHandler(descriptor_of(sys.stderr))
    logging.basicConfig(handlers=[handler], format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.captureWarnings(True)
    logging.getLogger("vllm_mlx").setLevel(level.upper())
