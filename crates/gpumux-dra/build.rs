//! Makes Rust of the kubelet's protocols, without protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = [
        "pluginregistration",
        "dra_v1",
        "dra_v1beta1",
        "health_v1",
        "health_v1alpha1",
        "podresources",
    ]
    .map(|name| format!("{name}.proto"));
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
