"""The operator: validates `DCPDisaggDeployment` objects and keeps their prefill and decode engines running."""
