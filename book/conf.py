"""How Sphinx renders the book. `nanobook.site` lays the pages out beside a copy of this file."""

from typing import ClassVar

from ipython_pygments_lexers import IPython3Lexer
from nanobook.pages import LEXER
from pygments.lexer import bygroups, using
from pygments.lexers import PythonLexer
from pygments.token import Comment, Text

project = "nanoserve"
author = "the nanoserve authors"
html_title = "nanoserve: build an LLM server"

extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}

# What is rendered has been run already.
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
mathjax_path = "vendor/mathjax.js"
suppress_warnings = ["mystnb.unknown_mime_type"]

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_favicon = "_static/favicon.svg"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "use_source_button": False,
    # The theme's own sidebar has the search field; these would show a second one.
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


class CourseLexer(IPython3Lexer):
    """Python with IPython's magics, where a build cell is a line to say so and plain Python."""

    name = "Python with the course's magics"
    aliases = (LEXER,)
    tokens: ClassVar = {
        **IPython3Lexer.tokens,
        "root": [
            (
                r"(?s)(%%build)([^\n]*\n)(.*)",
                bygroups(Comment.Preproc, Comment.Preproc, using(PythonLexer)),
            ),
            (
                r"^(%(?:load_ext|chapter|provide|check|hint)\b)([^\n]*)",
                bygroups(Comment.Preproc, Text),
            ),
            *IPython3Lexer.tokens["root"],
        ],
    }


def setup(app):  # type: ignore[no-untyped-def]
    """Make the lexer known."""
    app.add_lexer(LEXER, CourseLexer)
