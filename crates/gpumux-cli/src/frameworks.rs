//! Settings by which frameworks take device memory as they need it, instead of most of the device when they start.
//!
//! JAX takes three quarters of the device at its first operation, TensorFlow nearly all of it. What is never written cannot be
//! told apart from data, so it would be moved like data. `gpumux run` sets what the user has not set.

use std::{env, process::Command};

/// What `gpumux run` does with these settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum FrameworkMemory {
    /// Have them take memory as they need it
    #[default]
    Grow,
    /// Leave them as they are: JAX takes 75% of the device, TensorFlow nearly all
    Leave,
}

/// A variable, and what it is set to unless one of the others is set.
struct Setting {
    variable: &'static str,
    value: &'static str,
    unless: &'static [&'static str],
}

const SETTINGS: [Setting; 2] = [
    // docs.jax.dev, "GPU memory allocation"; the fraction has an old and a new name.
    Setting {
        variable: "XLA_PYTHON_CLIENT_PREALLOCATE",
        value: "false",
        unless: &[
            "XLA_CLIENT_MEM_FRACTION",
            "XLA_PYTHON_CLIENT_MEM_FRACTION",
            "XLA_PYTHON_CLIENT_ALLOCATOR",
        ],
    },
    // tensorflow.org, "Use a GPU: limiting GPU memory growth".
    Setting {
        variable: "TF_FORCE_GPU_ALLOW_GROWTH",
        value: "true",
        unless: &["TF_GPU_ALLOCATOR"],
    },
];

/// What is to be set where these variables are set already.
fn missing(is_set: impl Fn(&str) -> bool) -> impl Iterator<Item = &'static Setting> {
    SETTINGS
        .iter()
        .filter(move |it| !is_set(it.variable) && !it.unless.iter().any(|other| is_set(other)))
}

/// Sets them for a program. What a user should know of that, if anything was set.
pub(crate) fn set(program: &mut Command) -> Option<String> {
    let set: Vec<String> = missing(|name| env::var_os(name).is_some())
        .map(|it| {
            program.env(it.variable, it.value);
            format!("{}={}", it.variable, it.value)
        })
        .collect();
    (!set.is_empty()).then(|| {
        format!(
            "set {}, so that memory is taken as it is needed; --framework-memory leave sets nothing",
            set.join(" and ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_of_the_user_is_left_alone() {
        let names = |given: &[&str]| -> Vec<&str> {
            missing(|name| given.contains(&name))
                .map(|it| it.variable)
                .collect()
        };
        let (jax, tensorflow) = ("XLA_PYTHON_CLIENT_PREALLOCATE", "TF_FORCE_GPU_ALLOW_GROWTH");
        assert_eq!(names(&[]), [jax, tensorflow]);
        assert_eq!(names(&[jax]), [tensorflow]);
        assert_eq!(names(&["XLA_CLIENT_MEM_FRACTION", tensorflow]), [""; 0]);
        assert_eq!(
            names(&["XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_GPU_ALLOCATOR"]),
            [""; 0]
        );
        assert_eq!(names(&["XLA_PYTHON_CLIENT_ALLOCATOR"]), [tensorflow]);
    }
}
