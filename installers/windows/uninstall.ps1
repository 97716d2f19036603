<#
.SYNOPSIS
Removes what install.ps1 made: the service, the environment, the node's data and its key, the entry on PATH.

.EXAMPLE
powershell -ExecutionPolicy Bypass -File installers\windows\uninstall.ps1 -KeepIdentity
#>
[CmdletBinding()]
param(
    # Leave the node's key where it is, for a later install.
    [switch] $KeepIdentity
)

Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'
. (Join-Path $PSScriptRoot 'settings.ps1')

$data = Join-Path $env:LOCALAPPDATA 'echo-node'

if (Test-Path -LiteralPath $EchoNode) {
    & $EchoNode service uninstall
    if ($LASTEXITCODE -ne 0) { Write-Warning 'The service could not be asked to stop.' }
    if (Test-Path -LiteralPath (Join-Path $data 'control.json')) {
        & $EchoNode leave --force
        if ($LASTEXITCODE -ne 0) { Write-Warning 'The node could not be asked to stop.' }
    }
}

Set-UserPath @(Get-UserPath | Where-Object { $_ -ne $BinDir })

if (Test-Path -LiteralPath $data) {
    if ($KeepIdentity) {
        Get-ChildItem -LiteralPath $data -Force | Where-Object Name -ne 'identity.key' | Remove-Item -Recurse -Force
        Write-Host "Kept the node's key: $data\identity.key"
    }
    else { Remove-Item -LiteralPath $data -Recurse -Force }
}
if ($env:ECHO_NODE_HOME) { Write-Host "Left as it is: $env:ECHO_NODE_HOME (ECHO_NODE_HOME)" }
if (Test-Path -LiteralPath $Environment) { [IO.Directory]::Delete($Environment) } # The junction first.
if (Test-Path -LiteralPath $HomeDir) { Remove-Item -LiteralPath $HomeDir -Recurse -Force }
Write-Host 'Removed echo-node.'
