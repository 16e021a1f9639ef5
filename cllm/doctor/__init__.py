"""Doctor: checks of this installation and a model, and experiments on the latency of identical requests.

Prints nothing.  `examine` yields frozen findings: checks, the plan of the experiments, the experiments with
their measurements and diagnosis, and the conclusion.
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
from cllm.doctor.plot import (
    PLOT_FORMATS,
    has_matplotlib,
    save_plot,
    save_ratios_plot,
    save_rows_plot,
)
from cllm.doctor.preflight import preflight_check
from cllm.doctor.row_costs import N_TURNS, QUICK_N_TURNS, RowCosts, measure_rows

__all__ = (
    "N_TURNS",
    "PLOT_FORMATS",
    "QUICK_N_TURNS",
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
    "RowCosts",
    "Shape",
    "Status",
    "conclude",
    "diagnose",
    "examine",
    "growth",
    "has_matplotlib",
    "measure_rows",
    "preflight_check",
    "save_plot",
    "save_ratios_plot",
    "save_rows_plot",
)
