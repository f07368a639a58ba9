//! The kubelet's protocols, made from `proto/` at build time. Modules are nested as the packages are.
#![allow(missing_docs, clippy::all)]

pub mod registration {
    tonic::include_proto!("pluginregistration");
}
mod dra {
    pub mod v1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
    }
    pub mod v1beta1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
    }
}
mod node {
    // Pod resources and health.
    pub mod v1 {
        tonic::include_proto!("v1");
    }
    pub mod v1alpha1 {
        tonic::include_proto!("v1alpha1");
    }
}
pub use dra::{v1, v1beta1};
pub use node::{
    v1 as pod_resources, v1::dra_resource_health_server as health_v1, v1alpha1 as health,
};
