//! The kubelet's protocols, made from `proto/` at build time.
#![allow(missing_docs, clippy::all)]

pub mod registration {
    tonic::include_proto!("pluginregistration");
}
pub mod v1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}
pub mod v1beta1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
}
pub mod health {
    tonic::include_proto!("v1alpha1");
}
pub mod pod_resources {
    tonic::include_proto!("v1");
}
