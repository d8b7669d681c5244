"""Packaging; everything is said in setup.cfg."""

from setuptools import setup

setup()
