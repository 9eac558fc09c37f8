"""Coding agents that can be started with a model of this machine: their settings, and changes of their files."""
