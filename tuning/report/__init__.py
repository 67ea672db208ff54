"""Reports: summary, text, HTML, figures, best.yaml."""
