"""The texts that models are measured with, where an application quantizes or compares them."""

from PyInstaller.utils.hooks import collect_data_files

datas = collect_data_files("localinfer.apps.evaluate", includes=["*.txt"])
