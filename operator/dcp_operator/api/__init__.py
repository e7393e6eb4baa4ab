"""The API `dcpdisagg.io/v1alpha1`: pydantic models, their CRD, and Kubernetes quantities."""
