"""The doctor: whether this installation is sound, and latency grows over identical requests.

Knows `cllm.bindings` and no terminal.  `examine` yields frozen findings: checks, then experiments
with what they measured and the cause that their pattern stands for, then the answer.
"""

from cllm.doctor.diagnosis import conclude, diagnose, growth
from cllm.doctor.examination import examine
from cllm.doctor.findings import (
    Cause,
    Check,
    Conclusion,
    Diagnosis,
    Experiment,
    Finding,
    Measurement,
    Plan,
    Refusal,
    Report,
    Shape,
    Status,
)
from cllm.doctor.plot import PLOT_FORMATS, has_matplotlib, save_plot

__all__ = (
    "PLOT_FORMATS",
    "Cause",
    "Check",
    "Conclusion",
    "Diagnosis",
    "Experiment",
    "Finding",
    "Measurement",
    "Plan",
    "Refusal",
    "Report",
    "Shape",
    "Status",
    "conclude",
    "diagnose",
    "examine",
    "growth",
    "has_matplotlib",
    "save_plot",
)
