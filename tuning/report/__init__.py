"""What is told: summary, text, HTML, figures, best.yaml."""
