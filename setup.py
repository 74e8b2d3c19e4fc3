"""Everything static stands in pyproject.toml; this file is where compiled extensions are declared."""

from setuptools import setup

setup()
