//! Reads the lists of nodes and pods that Alibaba published with the trace `cluster-trace-gpu-v2023`.

use serde::Deserialize;

use crate::model::{Class, Demand, MOST_GPUS, ModelSet, Models, NodeSpec, Pod, WHOLE};

/// Why a list cannot be used. Lines count from 1, the heading included.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is not the list that was expected.
    #[error("line {line}: {source}")]
    Csv {
        /// Where.
        line: u64,
        /// What the reader met.
        source: csv::Error,
    },
    /// A row has not the columns that were expected.
    #[error("line {line}: {why}")]
    Row {
        /// Where.
        line: u64,
        /// What is wrong with it.
        why: String,
    },
    /// A value is of another kind.
    #[error("line {line}: {column} is `{value}`: {why}")]
    Value {
        /// Where.
        line: u64,
        /// The column.
        column: String,
        /// What is there.
        value: String,
        /// What is wrong with it.
        why: String,
    },
    /// A number is outside what a fleet can hold.
    #[error("line {line}: {what} of {name} is {value}, at most {most} is possible")]
    TooLarge {
        /// Where.
        line: u64,
        /// The node or pod.
        name: String,
        /// The column.
        what: &'static str,
        /// The value.
        value: u64,
        /// The bound.
        most: u64,
    },
    /// More GPU models than fit.
    #[error("line {line}: GPU model `{name}` is one too many: at most 64 are possible")]
    Models {
        /// Where.
        line: u64,
        /// The model.
        name: String,
    },
}

#[derive(Deserialize)]
struct NodeRow {
    sn: String,
    cpu_milli: u32,
    memory_mib: u32,
    gpu: u64,
    #[serde(default)]
    model: String,
    #[serde(default)]
    gpu_memory_mib: u32,
}

#[derive(Deserialize)]
struct PodRow {
    name: String,
    cpu_milli: u32,
    memory_mib: u32,
    num_gpu: u64,
    gpu_milli: u64,
    #[serde(default)]
    gpu_spec: String,
    #[serde(default)]
    qos: String,
    #[serde(default)]
    creation_time: Option<u64>,
    #[serde(default)]
    deletion_time: Option<u64>,
    #[serde(default)]
    gpu_memory_mib: u32,
}

/// Rows with the lines on which they stand.
fn rows<T: for<'a> Deserialize<'a>>(text: &str) -> impl Iterator<Item = Result<(u64, T), Error>> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let headings = reader.headers().cloned().unwrap_or_default();
    (2..).zip(reader.into_records()).map(move |(line, record)| {
        let line_of = |at: Option<&csv::Position>| at.map_or(line, csv::Position::line);
        let record = record.map_err(|source| Error::Csv {
            line: line_of(source.position()),
            source,
        })?;
        let line = line_of(record.position());
        let row = record.deserialize(Some(&headings));
        let row = row.map_err(|source| wrong(line, &headings, &record, source))?;
        Ok((line, row))
    })
}

/// A row that is not what was expected: with column and value, if it is one of these.
fn wrong(
    line: u64,
    headings: &csv::StringRecord,
    row: &csv::StringRecord,
    source: csv::Error,
) -> Error {
    let csv::ErrorKind::Deserialize { err, .. } = source.kind() else {
        return Error::Csv { line, source };
    };
    let at = err.field().and_then(|field| usize::try_from(field).ok());
    let of_column = at.and_then(|at| Some((headings.get(at)?, row.get(at)?)));
    match of_column {
        Some((column, value)) => Error::Value {
            line,
            column: column.to_owned(),
            value: value.to_owned(),
            why: err.kind().to_string(),
        },
        None => Error::Row {
            line,
            why: err.kind().to_string(),
        },
    }
}

/// The nodes of a list with the columns `sn,cpu_milli,memory_mib,gpu,model`, and where present `gpu_memory_mib` of each GPU.
///
/// # Errors
/// A column is missing or no number, or a node has more than [`MOST_GPUS`] GPUs.
pub fn nodes(text: &str, models: &mut Models) -> Result<Vec<NodeSpec>, Error> {
    let node = |found: Result<(u64, NodeRow), Error>| {
        let (line, row) = found?;
        let gpus = bounded(line, &row.sn, "gpu", row.gpu, MOST_GPUS as u64)?;
        let number = models.number(&row.model);
        let name = row.model;
        let model = number.ok_or(Error::Models { line, name })?;
        Ok(NodeSpec {
            name: row.sn,
            cpu_milli: row.cpu_milli,
            memory_mib: row.memory_mib,
            gpus: u8::try_from(gpus).unwrap_or(u8::MAX),
            model,
            gpu_memory_mib: row.gpu_memory_mib,
            domain: 0,
        })
    };
    rows(text).map(node).collect()
}

/// The pods of a list with the columns `name,cpu_milli,memory_mib,num_gpu,gpu_milli`, and where present `gpu_spec`
/// (models, separated by `|`), `qos`, `creation_time`, `deletion_time`, and `gpu_memory_mib` of each GPU. All are
/// guaranteed.
///
/// # Errors
/// A column is missing or no number, or a pod asks for more than [`MOST_GPUS`] GPUs.
pub fn pods(text: &str, models: &mut Models) -> Result<Vec<Pod>, Error> {
    let pod = |found: Result<(u64, PodRow), Error>| {
        let (line, row) = found?;
        let gpus = bounded(line, &row.name, "num_gpu", row.num_gpu, MOST_GPUS as u64)?;
        let mut accepted = ModelSet::ANY;
        for name in row.gpu_spec.split('|').filter(|name| !name.is_empty()) {
            let number = models.number(name);
            let name = name.to_owned();
            accepted = accepted.with(number.ok_or(Error::Models { line, name })?);
        }
        let milli = bounded(
            line,
            &row.name,
            "gpu_milli",
            row.gpu_milli,
            u64::from(WHOLE),
        )?;
        let demand = Demand {
            cpu_milli: row.cpu_milli,
            memory_mib: row.memory_mib,
            gpus: u8::try_from(gpus).unwrap_or(u8::MAX),
            milli: if gpus == 0 {
                0
            } else {
                u32::try_from(milli).unwrap_or(WHOLE)
            },
            models: if gpus == 0 { ModelSet::ANY } else { accepted },
            gpu_memory_mib: row.gpu_memory_mib,
            bandwidth_milli: 0,
            class: Class::Guaranteed,
        };
        Ok(Pod {
            name: row.name,
            demand,
            created_s: row.creation_time.unwrap_or(0),
            deleted_s: row.deletion_time.unwrap_or(u64::MAX),
            latency_sensitive: row.qos != "BE",
        })
    };
    rows(text).map(pod).collect()
}

/// The rows of any list with a heading.
///
/// # Errors
/// A column is missing, or has another kind of value.
pub fn table<T: for<'a> Deserialize<'a>>(text: &str) -> Result<Vec<T>, Error> {
    rows(text).map(|row| Ok(row?.1)).collect()
}

fn bounded(line: u64, name: &str, what: &'static str, value: u64, most: u64) -> Result<u64, Error> {
    let name = name.to_owned();
    match value <= most {
        true => Ok(value),
        false => Err(Error::TooLarge {
            line,
            name,
            what,
            value,
            most,
        }),
    }
}
