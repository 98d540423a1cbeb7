"""The plotly.js of the plotly package, sent to each page once, however many charts it has. Nothing comes from a network."""

from __future__ import annotations

import gzip
import pathlib
import threading

from amp_widgets.charts._extras import missing_extra

try:
    import anywidget
    import plotly
    import traitlets
except ImportError as error:
    raise missing_extra(error) from error


class PlotlyAsset(anywidget.AnyWidget):
    """A widget without a view that carries plotly.js; charts refer to it. Get it from :func:`plotly_asset`."""

    _esm = "export default { render() {} };"
    version = traitlets.Unicode().tag(sync=True)
    gzipped = traitlets.Bytes().tag(sync=True)


def plotly_asset() -> PlotlyAsset:
    """The one asset of this process, made when first asked for."""
    global _asset
    with _lock:
        if _asset is None or _asset.comm is None:  # closed, as by ipywidgets.Widget.close_all()
            script = pathlib.Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
            _asset = PlotlyAsset(version=plotly.__version__, gzipped=gzip.compress(script.read_bytes(), 6))
        return _asset


_asset: PlotlyAsset | None = None
_lock = threading.Lock()
