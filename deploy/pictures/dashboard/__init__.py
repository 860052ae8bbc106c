"""A picture of the Grafana dashboard, drawn without Grafana."""
