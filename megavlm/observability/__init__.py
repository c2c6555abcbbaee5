"""What a run leaves behind: metrics, samples, plots, the report. Imports no package of megavlm."""
