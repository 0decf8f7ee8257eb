"""What the commands import before they need it."""

import subprocess
import sys


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, vllm_mlx.cli.main as main\n"
        "try: main.make_app()(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'transformers', 'tokenizers', 'huggingface_hub', 'fastapi', 'uvicorn'}\n"
        "sys.exit(','.join(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_port_is_checked_before_anything_heavy_is_loaded() -> None:
    code = (
        "import sys, vllm_mlx.cli.main, vllm_mlx.server.run\n"
        "vllm_mlx.cli.main.make_app()\n"
        "sys.exit(','.join({'mlx', 'mlx_lm', 'transformers'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
