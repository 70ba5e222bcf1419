"""`write_report`: one HTML file that shows what training did to a model, and lets people read its responses.

    figures.py    the numbers behind the charts and the tables
    findings.py   what they say, in words
    samples.py    responses, compressed in pieces that a browser opens one by one
    page.py       all of it as one file, together with assets/

Nothing is fetched when the page is opened, and its content security policy forbids it. What a model wrote never becomes
markup: it travels as compressed base64 and is shown as text.
"""

from capo_megatron.evaluation.report.page import write_report
from capo_megatron.evaluation.report.samples import MOST_SAMPLES

__all__ = ["MOST_SAMPLES", "write_report"]
