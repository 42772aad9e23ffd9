from __future__ import annotations

import pytest

from hybridattn.analysis.page import Page
from hybridattn.core.errors import InputError


def test_a_page_is_self_contained_and_escapes_what_it_is_given(tmp_path):
    picture = tmp_path / "a.svg"
    picture.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    page = Page("<b>A & B</b>")
    page.text("x < y", "answer")
    page.table(("a", "b"), [("1", "<script>")], caption="t")
    page.code("k: v", "more")
    page.picture(picture, 'a "caption"')
    html = page.html()
    assert html.startswith("<!doctype html>") and '<meta charset="utf-8">' in html
    assert "<script" not in html and "&lt;script&gt;" in html and "&lt;b&gt;A &amp; B" in html
    assert "src=" in html and 'src="http' not in html and "<link" not in html and "@import" not in html


def test_tables_and_pictures_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(InputError, match="2 cells"):
        Page("t").table(("a", "b"), [("1",)])
    with pytest.raises(InputError, match="neither PNG nor SVG"):
        Page("t").picture(tmp_path / "a.gif", "")
