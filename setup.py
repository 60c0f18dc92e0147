"""Packages of the wheel: the library, and configs/ as fedfr_jax.configs inside it."""

from setuptools import find_namespace_packages, find_packages, setup

configs = find_namespace_packages(include=["configs", "configs.*"])

setup(
    packages=[
        *find_packages(include=["fedfr_jax*"]),
        *(f"fedfr_jax.{name}" for name in configs),
    ],
    package_dir={"fedfr_jax.configs": "configs"},
)
