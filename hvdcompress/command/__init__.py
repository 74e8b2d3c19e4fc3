"""The command line: `hvdcompress doctor`, `bench` and `plan`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs it; says what is missing where it was installed without its packages."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
        import threadpoolctl  # noqa: F401
    except ImportError as error:
        sys.exit(f"the command line needs {error.name}: pip install 'hvdcompress[cli]'")
    from .app import app

    app(prog_name="hvdcompress")
