"""`python -m vllm_mlx`."""

from .cli.main import main

if __name__ == "__main__":
    main()
