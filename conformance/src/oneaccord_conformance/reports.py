"""A report as text, as JSON, and as JUnit's XML."""

from __future__ import annotations

import json
import re
from textwrap import indent
from xml.etree.ElementTree import Element, SubElement, tostring
from xml.etree.ElementTree import indent as indent_xml

from oneaccord_conformance.registry import CHAPTERS
from oneaccord_conformance.running import Report

__all__ = ["as_json", "as_junit", "as_text"]

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")


def as_text(report: Report) -> str:
    """Return the failures, a line for each chapter, and the verdict."""
    lines = []
    for each in report.results:
        if each.status == "failed":
            lines += [f"FAILED {each.check.title}: {each.check.promise}", indent(each.text or "(no words)", "  "), ""]
    width = max(map(len, CHAPTERS))
    for chapter, about in CHAPTERS.items():
        counts = {status: report.count(status, chapter) for status in ("passed", "failed", "skipped")}
        if any(counts.values()):
            took_s = sum(each.took_s for each in report.results if each.check.chapter == chapter)
            words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
            lines.append(f"{chapter:{width}}  {words:24}  {took_s:5.1f} s  {about}")
    reasons = dict.fromkeys(each.text for each in report.results if each.status == "skipped")
    lines += [f"skipped: {reason}" for reason in reasons]
    failed, skipped = report.count("failed"), report.count("skipped")
    if report.left:
        ran = len(report.results)
        verdict = f"{report.backend} was interrupted after {ran} of {ran + report.left} checks: {failed} failed"
    elif failed:
        verdict = f"{report.backend} does not conform: {failed} of {len(report.results) - skipped} checks failed"
    elif report.conforms:
        verdict = f"{report.backend} conforms: {report.count('passed')} checks passed"
    else:
        verdict = f"{report.backend}: nothing was checked"
    return "\n".join([*lines, "", verdict])


def as_json(report: Report) -> str:
    """Return the report for programs."""
    checks = [
        {
            "chapter": each.check.chapter,
            "name": each.check.name,
            "promise": each.check.promise,
            "status": each.status,
            "text": each.text,
            "seconds": round(each.took_s, 4),
        }
        for each in report.results
    ]
    return json.dumps(
        {"backend": report.backend, "ranks": report.ranks, "conforms": report.conforms, "checks": checks}, indent=2
    )


def as_junit(report: Report) -> str:
    """Return the report as JUnit's XML, as continuous integration reads it."""
    suite = Element(
        "testsuite",
        name=f"oneaccord check {report.backend}",
        tests=str(len(report.results)),
        failures=str(report.count("failed")),
        errors="0",
        skipped=str(report.count("skipped")),
        time=f"{sum(each.took_s for each in report.results):.3f}",
    )
    for each in report.results:
        case = SubElement(
            suite,
            "testcase",
            classname=f"{report.backend}.{each.check.chapter}",
            name=each.check.name,
            time=f"{each.took_s:.3f}",
        )
        text = _UNPRINTABLE.sub("?", each.text)
        if each.status == "failed":
            SubElement(case, "failure", message=text.partition("\n")[0]).text = text
        elif each.status == "skipped":
            SubElement(case, "skipped", message=text)
    suites = Element("testsuites")
    suites.append(suite)
    indent_xml(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(suites, encoding="unicode")
