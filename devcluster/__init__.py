"""A real single-node Kubernetes on this machine, for the demo and the tests.

``python -m devcluster up`` starts etcd, the Kubernetes control plane, containerd, a kubelet and kube-proxy from
binaries that are built once into a cache. Everything that it writes lies in that cache; ``down`` removes the rest.
"""
