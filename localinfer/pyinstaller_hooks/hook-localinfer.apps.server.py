"""The files of the chat page, where an application has the server."""

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

hiddenimports = collect_submodules("localinfer.apps.server")
datas = collect_data_files("localinfer.apps.webui")
