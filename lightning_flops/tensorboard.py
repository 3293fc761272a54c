"""TensorBoard's tab "FLOPs": the page of a profile, for the runs that TensorBoard shows.

TensorBoard finds it by the entry point ``tensorboard_plugins``. It reads event files of the profiler's own,
so it shows the runs of a remote log folder as well. Neither torch nor a training framework is loaded.
"""

from __future__ import annotations

import functools
import gzip
import os
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import urlencode

import msgspec
from tensorboard import errors, plugin_util
from tensorboard.backend import http_util
from tensorboard.data.provider import RunTagFilter
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from lightning_flops.config import BLOCK, OWN_FOLDER
from lightning_flops.errors import ProfileFormatError
from lightning_flops.report.html_page import PageRun, WindowFigures, bundled, document, profile_view
from lightning_flops.schema import codec
from lightning_flops.schema.profile import Profile
from lightning_flops.sinks.services import PLUGIN
from lightning_flops.units import printable

_FRONTEND: Final = {"index.js": "text/javascript", "page.js": "text/javascript", "style.css": "text/css"}
_WINDOW: Final = "window"

# Answers with the headers that TensorBoard gives its own answers, among them its policy.
_answer: Callable[..., wrappers.Response] = http_util.Respond


class FlopsPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """Serves the page's files, the list of runs, and one profile at a time."""

    plugin_name = PLUGIN

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._data = context.data_provider

    def is_active(self) -> bool:
        """Whether to show the tab without asking for data: no. TensorBoard shows it where a run has data for it."""
        return False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """The tab's name and its script."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="FLOPs", disable_reload=True)

    def get_plugin_apps(self) -> dict[str, Callable[..., Iterable[bytes]]]:
        """What is served, by address below the plugin's own."""
        served: dict[str, Callable[[wrappers.Request], wrappers.Response]] = {
            f"/{name}": functools.partial(_answer, content=bundled(name), content_type=kind)
            for name, kind in _FRONTEND.items()
        }
        served |= {"/runs": self._runs, "/profile": self._profile}
        return {path: wrappers.Request.application(answer) for path, answer in served.items()}

    def _runs(self, request: wrappers.Request) -> wrappers.Response:
        """Every run with a few figures of each of its windows."""
        found: dict[str, PageRun] = {}
        listed = self._data.list_tensors(
            plugin_util.context(request.environ),
            experiment_id=plugin_util.experiment_id(request.environ),
            plugin_name=PLUGIN,
        )
        for run, tags in listed.items():
            for tag, series in tags.items():
                name = _name_of(run, tag)
                shown = found.setdefault(name, PageRun(name))
                try:
                    figures = msgspec.json.decode(series.plugin_content, type=WindowFigures)
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    shown.problems.append(printable(f"{tag}: its figures cannot be read: {error}"))
                else:
                    figures.address = urlencode({"run": run, "tag": tag})
                    shown.windows.append(figures)
        for shown in found.values():
            shown.windows.sort(key=lambda window: window.profile_step)
        return _answer(request, document([found[name] for name in sorted(found)]), "application/json")

    def _profile(self, request: wrappers.Request) -> wrappers.Response:
        """The view of one window. Whatever is wrong with its profile, the others can still be chosen."""
        run, tag = request.args.get("run", ""), request.args.get("tag", "")
        try:
            found = self._data.read_tensors(
                plugin_util.context(request.environ),
                experiment_id=plugin_util.experiment_id(request.environ),
                plugin_name=PLUGIN,
                downsample=100,
                run_tag_filter=RunTagFilter(runs=[run], tags=[tag]),
            )
        except errors.NotFoundError:
            found = {}
        series = found.get(run, {}).get(tag, [])
        if not series:
            return _answer(request, "There is no such window any more.", "text/plain", code=404)
        try:
            profile = Profile.from_json(gzip.decompress(series[-1].numpy.item()).decode("utf-8"))
            view = codec.dump(profile_view(profile), indented=False)
        except Exception as error:  # the file may hold anything
            words = str(error) if isinstance(error, (ProfileFormatError, ValueError)) else f"{error!r}"
            return _answer(request, f"{run}, {tag}: {printable(words)}", "text/plain", code=422)
        return _answer(request, view, "application/json")


def _name_of(run: str, tag: str) -> str:
    """How the page calls the windows of *tag*: by the folder of the run's logs, and by the tag's prefix if need be."""
    logs, _, last = run.replace(os.sep, "/").rpartition("/")
    if last == OWN_FOLDER:
        run = logs or "."  # as TensorBoard calls the folder that it was given
    whose = tag.rpartition(f"/{_WINDOW}/")[0].removeprefix(BLOCK).strip("/")
    return f"{run} {whose}".strip() if whose else run
