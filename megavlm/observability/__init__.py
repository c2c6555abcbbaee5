"""Records of a run: metrics, samples, plots, the report. Imports no other package of megavlm."""
